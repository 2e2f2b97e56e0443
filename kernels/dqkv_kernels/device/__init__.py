"""Code that runs on a GPU, in CuTe DSL: importing a module here needs the compiler, running what it made does not."""
