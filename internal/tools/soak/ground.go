//go:build linux

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// makeMachines tries to make machines. It returns nil where the system lacks something, or the
// rights to it, after it has said so.
func (s *soaking) makeMachines(g *proctest.Ground) (all []*proctest.Namespace, err error) {
	err = g.Run(func() error {
		all = proctest.Machines(g, mostMachines, proctest.Wire{})
		return nil
	})
	if errors.Is(err, proctest.ErrLacking) {
		s.lacking.Do(func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			fmt.Fprintf(s.out, "jobs of several machines run on one: %v\n", err)
		})
		return nil, nil
	}
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
