"""`python -m data_tools` is `moba-data`."""

from data_tools.cli import app

if __name__ == "__main__":
    app(prog_name="moba-data")
