package proctest

import (
	"math/rand/v2"
	"net"
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
// the first. What the namespace sends and starved selects is lost.
func (w Wire) connect(t T, name, hub string, starved func(frame []byte) bool) {
	t.Helper()
	if w == (Wire{}) {
		need(t, "-n "+name+" link add eth0 type veth peer name "+name+" netns "+hub)
		return
	}
	ends := [2]*os.File{tap(t, name, "eth0"), tap(t, hub, name)}
	for i, from := range ends {
		frames := make(chan frame, 1000) // as a switch has; more are lost
		lost := starved
		if i == 1 {
			lost = func([]byte) bool { return false }
		}
		go w.takeFrames(from, frames, lost)
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

// takeFrames takes frames from an end until it is closed, but for those that are lost.
func (w Wire) takeFrames(from *os.File, frames chan<- frame, lost func(frame []byte) bool) {
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
		if luck.Float64() < w.Loss || lost(data[:n]) {
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

// hasData reports whether a frame has data of TCP, and for which address of IPv4. SYN, ACK and FIN
// alone have none.
func hasData(frame []byte) (to string, ok bool) {
	const ethernet, tcp = 14, 6
	if len(frame) < ethernet+20 || frame[12] != 8 || frame[13] != 0 || frame[ethernet+9] != tcp {
		return "", false
	}
	packet := frame[ethernet:]
	header := int(packet[0]&15) * 4
	if len(packet) < header+20 {
		return "", false
	}
	header += int(packet[header+12]>>4) * 4
	return net.IP(packet[16:20]).String(), int(packet[2])<<8|int(packet[3]) > header
}
