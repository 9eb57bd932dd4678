"""Operations that model files are written in: signatures (spec), torch (eager), exact numpy references (numerics)."""
