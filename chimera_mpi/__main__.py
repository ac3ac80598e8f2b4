"""`python -m chimera_mpi` is `chimera-mpi`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
