package driver

// Available returns nil if there is a CUDA driver with a device, and otherwise an error that says
// what is missing.
func Available() error { return status() }
