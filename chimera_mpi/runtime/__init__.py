"""Carries out schedules on torch and MPI: the only home of MPI besides the command line."""
