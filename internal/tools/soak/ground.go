//go:build linux

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// makeMachines makes machines, or returns nil where that takes rights that the soak does not have.
func makeMachines(g *proctest.Ground) (all []*proctest.Namespace, err error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	err = g.Run(func() error {
		all = proctest.Machines(g, mostMachines, proctest.Wire{})
		return nil
	})
	return all, err
}

// besiege has strangers storm the port of rank 0, and puts the other ranks far from it.
func (r *running) besiege(ports []int) {
	addr := fmt.Sprintf("127.0.0.1:%d", ports[0])
	source := "127.0.0.1"
	if r.job.number%2 == 0 {
		source = "127.0.0.2"
	}
	words := speech(r.job.rng())
	came := proctest.Storm(r.ground, source, addr, r.job.strangers, func(conn net.Conn) {
		conn.SetWriteDeadline(time.Now().Add(time.Second))
		conn.Write(words)
	})
	r.ground.Cleanup(func() { r.visits.Store(came.Load()) })
	port := proctest.Far(r.ground, addr, 25*time.Millisecond)
	for rank := range ports[1:] {
		ports[1+rank] = port
	}
}

// freePort returns a port on which nobody listens now, and that no connection takes as its own end.
func freePort() (int, error) {
	for {
		port := 15000 + rand.IntN(15000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return 0, err
		}
		return port, l.Close()
	}
}
