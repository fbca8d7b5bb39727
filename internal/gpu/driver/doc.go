// Package driver reports whether there are a CUDA driver and a device. A
// program built under tag gpu starts without them.
package driver
