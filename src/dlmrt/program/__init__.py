"""Programs: model and loop recorded once as kernels, whiles and ifs over planned buffers, and run without Python."""
