"""Pictures that are drawn again by small SVG programs: a safe reader and rasteriser of SVG, targets, and scores."""
