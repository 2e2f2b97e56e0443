"""What the tests of the image share: an engine that builds and runs it, and a base image where none can be fetched."""
