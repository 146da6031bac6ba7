"""What branches are made of: normalised weights, scalings, position biases, affine maps."""
