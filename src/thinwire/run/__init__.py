"""An unmodified PyTorch script under compression: ``thinwire run --policy balanced script.py``.

:mod:`.command` starts ranks through torchrun, or is one that Slurm or Open MPI has started (:mod:`.environment`);
:mod:`.rank` runs the script; :mod:`.patches` are the only places where thinwire changes PyTorch; :mod:`.report` says what
was sent.
"""
