"""The denoising loop: settings, sampling, commit rules, the loop itself, text, and the Engine that joins them."""
