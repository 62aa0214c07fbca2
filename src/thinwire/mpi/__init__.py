"""MPI under the collectives, through ``mpi4py``: what ``GroupOptions(backend="mpi")`` and ``mpi://`` stand on.

Read in this order: :mod:`.library` (find MPI, or say why not), :mod:`.process` (what all communicators of a process share:
progress, notices, the end), :mod:`.operation` (a call under way, with the time-out that MPI lacks), :mod:`.buffers` and
:mod:`.reductions` (tensors as MPI sees them), :mod:`.communicator` (the ranks of one group), :mod:`.transport` (bytes to
peers, for frames), :mod:`.group` (MPI's own collectives, for what passes through), :mod:`.rendezvous` (``mpi://``).

Importing this package imports neither ``mpi4py`` nor MPI: the first group does.
"""
