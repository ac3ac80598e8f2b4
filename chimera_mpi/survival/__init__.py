"""Go on in place when ranks die, as each stage of a bidirectional pipeline, or of several groups, is on several ranks.

A run is over a communicator; here is the loop around it. When a rank dies those that are left find out together
(`runtime.crew`), agree on the last step that is done, choose a layout that they can fill, hand each other the layers
and the optimizer's state of them from memory, and begin a run over a new communicator at that step, with the same
mini-batches, seeds and schedule of the learning rate.

Why no weights of two steps ever mix. All messages of a step come before its update: a rank waits for the sums of all
its gradients, then for the norm over all ranks, and then updates its weights without another message. On whichever
rank the norm's all-reduce returns, every rank has entered it, hence has all its sums. So when a rank dies

    in a forward, a backward or a sum of gradients   nobody has updated anything: the step is done anew
    in the norm's all-reduce                         some may have the norm and have updated, and others not; these have
                                                     their sums all the same, get the norm from one that has it, and
                                                     update: the step is done. If nobody has it, it is done anew
    after it: in the update, while messages leave,   the same: all who are left have the norm, or get it. The row of the
    in the reports, a flush of the log               step's log follows from the norm too, on any rank
    in an evaluation, a checkpoint                   the weights are not touched. It is done anew, by the new run; a
                                                     checkpoint that is not whole has no name
    while the others recover                         what the ranks held stays until all have agreed that the new run
                                                     stands; they recover anew, from that
    when all is done, before it is said              the run ends anew: there is nothing left to do but to say so

One agreement closes each stretch, of a run or of a recovery, so that no rank takes it for done and another not. A
step is never two apart on two ranks: no norm is known before all have entered its all-reduce.
"""

from .layouts import check_survivable, layouts
from .loop import Recovery, Survival

__all__ = ["Recovery", "Survival", "check_survivable", "layouts"]
