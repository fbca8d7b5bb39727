//go:build !gpu

package main

import "fmt"

// openGPUs returns an error that says how to build with GPU support.
func openGPUs() (*gpus, error) {
	return nil, fmt.Errorf("not in this build: GPUs need one with tag gpu; %s\n"+
		`in a module of your own: eval "$(euryale env)" && go build -tags gpu`+"\n"+
		"in a checkout of Euryale: make gpu, which makes bin/euryale", kernelDriver())
}
