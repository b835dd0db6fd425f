"""Pictures that the policy reproduces as SVG programs: a safe reader and rasteriser of SVG, targets, and scores."""
