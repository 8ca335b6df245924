"""The callbacks; each is exported by the package itself."""
