# Has no C types: it is compiled to tell that the others are.
