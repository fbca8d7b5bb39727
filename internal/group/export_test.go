package group

import "github.com/euryale-ml/euryale/rendezvous"

// PartTime is how long a rank that leaves waits for others.
const PartTime = partTime

// Kill takes a rank off the board as the end of its process does: without a word.
func (b *Sockets) Kill() {
	b.end()
	b.listener.Close()
	<-b.done
}

// Stall has a rank neither read nor write, as a stopped process, until the returned function
// is called.
func (b *Sockets) Stall() (proceed func()) {
	b.mu.Lock()
	b.hub.mu.Lock()
	return func() {
		b.hub.mu.Unlock()
		b.mu.Unlock()
	}
}

// Server returns the rank that serves, as this one sees it.
func (b *Sockets) Server() int { return b.server(b.later() - 1) }

// Misses reports whether a rank did not answer this one.
func (b *Sockets) Misses(rank int) bool { return b.misses(rank) }

// Cut cuts the connections of the ranks that this one serves.
func (b *Sockets) Cut() {
	b.hub.mu.Lock()
	defer b.hub.mu.Unlock()
	for l := range b.hub.lines {
		l.conn.Close()
	}
}

// World returns the rank's world, and Posted the number of its last call.
func (b *Sockets) World() *rendezvous.World { return b.world }
func (b *Sockets) Posted() uint64           { return b.posted.Load() }
