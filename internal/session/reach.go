package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
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
	// reachBytes are sent to it, more than a packet has: connections may be made where data, or
	// large packets, are lost.
	reachBytes = 8 << 10
)

// reach finds out which processes of a job on several machines this one reaches. Each listens for
// that at a port, as long as it takes part.
type reach struct {
	register rendezvous.Log
	ln       net.Listener // nil where all are on one machine
}

// reachKey is the log of the addresses, by ID.
const reachKey = "elastic/reach"

// listenAt listens at a free port, and returns its address on a host.
func listenAt(host string) (ln net.Listener, at string, err error) {
	if ln, err = net.Listen("tcp", ":0"); err != nil {
		return nil, "", err
	}
	_, port, err := net.SplitHostPort(ln.Addr().String())
	return ln, net.JoinHostPort(host, port), err
}

// freeAt returns the address of a port that is free on a host.
func freeAt(host string) (at string, err error) {
	ln, at, err := listenAt(host)
	if err == nil {
		err = ln.Close()
	}
	return at, err
}

// open makes others reach this process, on a host.
func (r *reach) open(ctx context.Context, host string, id elastic.ID) error {
	ln, at, err := listenAt(host)
	if err == nil {
		err = r.register.Set(ctx, fmt.Sprintf("%s/%d", reachKey, id), []byte(at))
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
				go serve(conn)
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
func (r *reach) unreached(ctx context.Context, ids []elastic.ID) []elastic.ID {
	for {
		began, seen := time.Now(), make([]signs, len(ids))
		trying, cancel := context.WithTimeout(ctx, reachTime)
		at, err := r.addresses(trying, ids)
		var tries sync.WaitGroup
		for i := range ids {
			// without the register, or an address in it, a process counts as one that answers
			if seen[i].answers = err != nil || at[i] == nil; !seen[i].answers {
				tries.Go(func() { seen[i] = try(trying, string(at[i])) })
			}
		}
		tries.Wait()
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if all, sure := judge(ids, seen, time.Since(began)); sure {
			return all
		}
	}
}

// addresses returns those of processes, nil for those that have not begun.
func (r *reach) addresses(ctx context.Context, ids []elastic.ID) ([][]byte, error) {
	numbers := make([]int, len(ids))
	for i, id := range ids {
		numbers[i] = int(id)
	}
	return r.register.Peek(ctx, reachKey, numbers...)
}

// try tries to reach the process at an address.
func try(ctx context.Context, at string) signs {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var took, lives, answers atomic.Bool
	var tries sync.WaitGroup
	for i := range 2 * dials {
		tries.Go(func() {
			select {
			case <-time.After(time.Duration(i/2) * reachTime / dials):
			case <-ctx.Done():
				return
			}
			if i%2 == 0 && answered(ctx, at) {
				answers.Store(true)
				cancel()
			}
			if i%2 == 1 && i < dials { // an answer would have come meanwhile
				taken(ctx, at, &took, &lives)
			}
		})
	}
	tries.Wait()
	return signs{answers.Load(), took.Load(), lives.Load()}
}

// What a process asks of another one by the first of the bytes that it sends: all of them back, or
// to close the connection, which takes no data.
const (
	askBack byte = iota
	askEnd
)

// answered reports whether a process sends data back, or nobody listens at its address any more.
func answered(ctx context.Context, at string) bool {
	conn, err := ask(ctx, at, askBack)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	defer conn.Close()
	_, err = io.ReadFull(conn, make([]byte, reachBytes))
	return err == nil
}

// taken finds out whether the machine of a process takes data, and whether the process lives.
func taken(ctx context.Context, at string, took, lives *atomic.Bool) {
	conn, err := ask(ctx, at, askEnd)
	if err != nil {
		return
	}
	defer conn.Close()
	for ctx.Err() == nil {
		conn.SetReadDeadline(time.Now().Add(reachTime / (10 * dials)))
		_, err := conn.Read(make([]byte, 1))
		if acked(conn.(*net.TCPConn)) {
			took.Store(true)
		}
		if errors.Is(err, io.EOF) {
			took.Store(true)
			lives.Store(true)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
}

// ask connects to a process and asks something of it, until a context ends.
func ask(ctx context.Context, at string, what byte) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", at)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	text := make([]byte, reachBytes)
	text[0] = what
	if _, err = conn.Write(text); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// serve does what another process asks.
func serve(conn net.Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(2 * reachTime))
	text := make([]byte, reachBytes)
	if _, err := io.ReadFull(conn, text); err == nil && text[0] == askBack {
		conn.Write(text)
	}
}
