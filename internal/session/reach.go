package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/rendezvous"
)

const (
	// reachTime is how long a process tries to reach another one, and dials how often: a packet of
	// one try may be lost, and a machine that is up answers even if the process is stopped.
	reachTime = time.Second
	dials     = 10
)

// reach finds out which processes of a job on several machines this one reaches. Each listens for
// that at a port, as long as it takes part.
type reach struct {
	register rendezvous.Store
	ln       net.Listener // nil where all are on one machine
}

func reachKey(id elastic.ID) string { return fmt.Sprintf("elastic/reach/%d", id) }

// listenAt listens at a free port, and returns its address on a host.
func listenAt(host string) (ln net.Listener, at string, err error) {
	if ln, err = net.Listen("tcp", ":0"); err != nil {
		return nil, "", err
	}
	_, port, err := net.SplitHostPort(ln.Addr().String())
	return ln, net.JoinHostPort(host, port), err
}

// open makes others reach this process, on a host.
func (r *reach) open(ctx context.Context, host string, id elastic.ID) error {
	ln, at, err := listenAt(host)
	if err == nil {
		err = r.register.Set(ctx, reachKey(id), []byte(at))
		r.ln = ln
	}
	if err != nil {
		return fmt.Errorf("euryale: let the other processes reach this one: %w", err)
	}
	go func() {
		for {
			conn, err := ln.Accept()
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err != nil: // out of file descriptors, say: the kernel answers
				time.Sleep(reachTime / dials)
			default:
				conn.Close()
			}
		}
	}()
	return nil
}

func (r *reach) close() {
	if r.ln != nil {
		r.ln.Close()
	}
}

// unreached is an [elastic.Unreached]. If this process was stopped meanwhile, it tries again.
func (r *reach) unreached(ctx context.Context, ids []elastic.ID) (all []elastic.ID) {
	for {
		began, found := time.Now(), make([]bool, len(ids))
		trying, cancel := context.WithTimeout(ctx, reachTime)
		var tries sync.WaitGroup
		for i, id := range ids {
			tries.Go(func() { found[i] = r.reaches(trying, id) })
		}
		tries.Wait()
		cancel()
		switch {
		case ctx.Err() != nil || !slices.Contains(found, false):
			return nil
		case time.Since(began) < 2*reachTime:
			for i, id := range ids {
				if !found[i] {
					all = append(all, id)
				}
			}
			return all
		}
	}
}

// reaches reports whether this process reaches another one, or its machine. One that has not begun
// counts as reached.
func (r *reach) reaches(ctx context.Context, id elastic.ID) bool {
	at, err := r.register.Get(ctx, reachKey(id))
	if err != nil {
		return true
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var reached atomic.Bool
	var tries sync.WaitGroup
	for i := range dials {
		tries.Go(func() {
			select {
			case <-time.After(time.Duration(i) * reachTime / dials):
			case <-ctx.Done():
				return
			}
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", string(at))
			if err == nil {
				conn.Close()
			}
			if err == nil || errors.Is(err, syscall.ECONNREFUSED) {
				reached.Store(true)
				cancel()
			}
		})
	}
	tries.Wait()
	return reached.Load()
}
