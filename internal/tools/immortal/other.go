//go:build !linux

// Command immortal kills random processes of an elastic job. It needs Linux.
package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "immortal: it needs Linux, whose /proc names the processes of a job")
	os.Exit(1)
}
