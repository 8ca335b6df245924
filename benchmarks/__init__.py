"""Side by side with torch's DistributedDataParallel: always in one run, interleaved, as ratios."""
