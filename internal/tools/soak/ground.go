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

	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// jobMemory is more than the shared memory of one job: the largest of 75 took 74 MB.
const jobMemory = 128 << 20

// sharedMemory makes a directory with room for the shared memory of some jobs at a time: in
// /dev/shm or, where that is too small, as in most containers, among temporary files. If neither
// has room, the error wraps proctest.ErrLacking.
func sharedMemory(jobs int) (dir string, err error) {
	for _, in := range []string{"/dev/shm", os.TempDir()} {
		tried, failed := shm.New(in, jobs*jobMemory)
		if failed == nil {
			dir, failed = os.MkdirTemp(in, "soak-")
			return dir, errors.Join(failed, tried.Unmap())
		}
		err = errors.Join(err, failed)
	}
	return "", fmt.Errorf("%w: %w", proctest.ErrLacking, err)
}

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

// besiege has unauthenticated clients storm the port of rank 0, and puts the other ranks far from
// it.
func (r *running) besiege(ports []int) {
	addr := fmt.Sprintf("127.0.0.1:%d", ports[0])
	source := "127.0.0.1"
	if r.job.number%2 == 0 {
		source = "127.0.0.2"
	}
	words := speech(r.job.rng())
	came := proctest.Storm(r.ground, source, addr, r.job.visitors, func(conn net.Conn) {
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
