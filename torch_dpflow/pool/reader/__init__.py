"""Reading one cached dataset in one process: which server has each stripe, and where it is mapped."""
