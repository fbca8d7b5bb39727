//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	// lookTime is how often ports are looked for.
	lookTime = 5 * time.Millisecond
	// helloBytes is the length of a hello: a magic of 8 bytes and a nonce.
	helloBytes = 40
)

// disturb connects to every port that the job listens on, until ctx has ended.
func (r *running) disturb(ctx context.Context) {
	rng := r.job.rng()
	known := map[string]bool{}
	for ctx.Err() == nil {
		for _, addr := range listening(r.id, known) {
			for range r.job.visitors {
				words := speech(rng)
				go r.visit(ctx, addr, words)
			}
		}
		time.Sleep(lookTime)
	}
}

// rng is the source of what unauthenticated clients do.
func (j job) rng() *rand.Rand { return rand.New(rand.NewPCG(j.seed, uint64(j.number)+1)) }

// speech is what an unauthenticated client says: nothing, noise, or the beginning of a handshake
// and then what no rank would say.
func speech(rng *rand.Rand) []byte {
	noise := make([]byte, rng.IntN(200))
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	hello := frame(1, append([]byte("euryale\n"), make([]byte, helloBytes-8)...))
	refusal := binary.LittleEndian.AppendUint64(nil, 2)
	refusal = binary.LittleEndian.AppendUint32(refusal, 25)
	refusal = append(refusal, "a client ends your job"...)
	switch rng.IntN(8) {
	case 0, 1:
		return nil // silent
	case 2:
		return noise
	case 3:
		return hello[:1+rng.IntN(len(hello)-1)]
	case 4:
		return append(hello, frame(2, make([]byte, 150))...) // a wrong proof
	case 5:
		return append(hello, frame(4, refusal)...)
	case 6:
		return append(hello, frame(byte(rng.IntN(20)), noise)...)
	}
	return binary.LittleEndian.AppendUint32(nil, 1<<31) // a very long frame
}

// frame is a frame as package rendezvous writes them.
func frame(kind byte, body []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(body)))
	b = append(b, kind, 0, 0, 0)
	return append(binary.LittleEndian.AppendUint64(b, 0), body...)
}

// visit is an unauthenticated client that says its words and listens until it is thrown out, or
// ctx has ended.
func (r *running) visit(ctx context.Context, addr string, words []byte) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return // too late
	}
	defer conn.Close()
	r.visits.Add(1)
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	conn.Write(words)
	io.Copy(io.Discard, conn)
}

// listening returns the addresses that processes of a run listen on and that are
// not known yet, and adds them to known.
func listening(id string, known map[string]bool) (addrs []string) {
	var sockets map[string]bool
	for _, l := range listeners() {
		if known[l.inode] {
			continue
		}
		if sockets == nil { // only now, for it takes a while
			sockets = socketsOf(id)
		}
		if sockets[l.inode] {
			known[l.inode] = true
			addrs = append(addrs, l.addr)
		}
	}
	return addrs
}

type listener struct{ inode, addr string }

// listeners returns the TCP ports of this machine that are listened on. They are the first lines,
// of lineBytes each. What is read beyond them has the kernel search all that is connected.
func listeners() (all []listener) {
	const listen, lineBytes = "0A", 150
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(name)
		if err != nil {
			continue // no IPv6
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Buffer(make([]byte, lineBytes), bufio.MaxScanTokenSize)
		for lines.Scan(); lines.Scan(); { // after the names of columns
			fields := strings.Fields(lines.Text())
			if len(fields) < 10 || fields[3] != listen {
				break
			}
			_, hex, _ := strings.Cut(fields[1], ":")
			var port int
			if _, err := fmt.Sscanf(hex, "%x", &port); err == nil {
				all = append(all, listener{fields[9], fmt.Sprintf("127.0.0.1:%d", port)})
			}
		}
	}
	return all
}

// socketsOf returns the inodes of the sockets that processes of a run have open.
func socketsOf(id string) map[string]bool {
	inodes := map[string]bool{}
	for _, pid := range processesOf(id) {
		links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, link := range links {
			target, err := os.Readlink(link)
			if inode, ok := strings.CutPrefix(target, "socket:["); ok && err == nil {
				inodes[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	return inodes
}
