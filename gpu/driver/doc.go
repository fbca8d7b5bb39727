// Package driver tells whether the CUDA driver and a device are there. A
// program built under tag gpu starts without them.
package driver
