"""Model providers behind one small Protocol."""
