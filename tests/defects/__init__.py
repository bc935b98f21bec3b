"""Planted defects: faults that were real elsewhere, put into the code to see the properties go red."""
