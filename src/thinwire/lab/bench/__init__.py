"""Benchmarks of codecs, collectives and whole training steps, recorded as JSON."""
