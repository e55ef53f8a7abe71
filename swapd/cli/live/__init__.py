"""The live view of `swapd top`: a status as lines (`screen`, pure), on a terminal (`app`)."""
