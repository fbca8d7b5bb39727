package proctest

import (
	"math/rand/v2"
	"os"
	"time"
)

// Wire is how a machine is connected to the network. The zero Wire is a pair of virtual interfaces
// (veth), as fast as the host. Others carry frames between two taps, in this process: not every
// kernel has tc's netem.
type Wire struct {
	Delay time.Duration // of a frame, each way
	Loss  float64       // the part of the frames that is lost
	Rate  int           // bytes in a second, each way; 0 for no limit
}

// connect connects a namespace, where the interface is eth0, to another, where it has the name of
// the first.
func (w Wire) connect(t T, name, hub string) {
	t.Helper()
	if w == (Wire{}) {
		need(t, "-n "+name+" link add eth0 type veth peer name "+name+" netns "+hub)
		return
	}
	ends := [2]*os.File{tap(t, name, "eth0"), tap(t, hub, name)}
	for i, from := range ends {
		frames := make(chan frame, 1000) // as a switch has; more are lost
		go w.take(from, frames)
		go deliver(frames, ends[1-i])
	}
}

// tap makes an interface in a namespace, and returns the other end of it.
func tap(t T, namespace, name string) *os.File {
	t.Helper()
	const made = "euryale0"
	f, err := newTap(made, name)
	if err != nil {
		lacking(t, "taps", err)
	}
	t.Cleanup(func() { f.Close() })
	need(t, "link set "+made+" netns "+namespace+" name "+name)
	return f
}

// frame is on its way.
type frame struct {
	at   time.Time // when it arrives
	data []byte
}

// take takes frames from an end until it is closed.
func (w Wire) take(from *os.File, frames chan<- frame) {
	defer close(frames)
	luck := rand.New(rand.NewPCG(1, 2))
	var free time.Time // when the wire has sent what was there before
	for {
		data := make([]byte, 2048) // above the usual MTU
		n, err := from.Read(data)
		if err != nil {
			return
		}
		now := time.Now()
		if free.Before(now) {
			free = now
		}
		if w.Rate > 0 {
			free = free.Add(time.Duration(n) * time.Second / time.Duration(w.Rate))
		}
		if luck.Float64() < w.Loss {
			continue
		}
		select {
		case frames <- frame{free.Add(w.Delay), data[:n]}:
		default: // the queue is full
		}
	}
}

// deliver gives frames to an end when they arrive. What cannot be taken there is lost, as where the
// interface is down.
func deliver(frames <-chan frame, to *os.File) {
	for f := range frames {
		time.Sleep(time.Until(f.at))
		to.Write(f.data)
	}
}
