"""Train transformers with bidirectional pipelines over MPI."""
