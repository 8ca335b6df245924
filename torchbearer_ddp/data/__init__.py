"""One rank's share of the data: loaders, samplers, random numbers, batch sizes."""
