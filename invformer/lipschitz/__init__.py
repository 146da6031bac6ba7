"""Local Lipschitz constants: Jacobian products of branches, and power iteration on them."""
