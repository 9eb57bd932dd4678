"""Model families, each written once over `dlmrt.ops`, and the configuration that tells siblings apart."""
