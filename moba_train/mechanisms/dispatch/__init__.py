"""The transport `dispatch`, which sends queries to the owners of keys, and attention one unit at a time for it."""
