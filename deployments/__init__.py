"""Where the flows run: pools, blocks, deployments, workers, and the embedded stack."""
