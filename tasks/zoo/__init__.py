"""The zoo: builders of named networks; those that no library builds are plain-torch stand-ins of ours."""
