"""Times and memory from formulas alone: roofline, collectives, overlap, pipelines; nothing here is learned by trees."""
