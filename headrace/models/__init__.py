"""Model families: config -> Graph. One file per family; families.py finds it."""
