"""The proof: emulated networks, the reference trainer, benchmarks and reports. The library never imports it."""
