"""Tables of measurements in the pages of docs/, made from the files that the measurements wrote."""
