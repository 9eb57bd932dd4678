"""orl: pre-training, On-Policy Residual Learning and evaluation of diffusion language models that `dlmrt` runs.

Importing the package loads nothing: every verb imports what it needs (torch comes with the `train` extra).

Source: ours; the method is described in docs/design.md.
"""
