"""What benchmarks and experiments share: measuring, results that merge, pages, and the models that are measured."""
