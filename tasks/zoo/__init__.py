"""The zoo: builders of named networks, and the command that walks them all into predictor/data/zoo.parquet."""
