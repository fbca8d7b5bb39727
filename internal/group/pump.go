package group

import (
	"bufio"
	"net"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// pump keeps a rank connected to the server of its term, until Release. A rank that serves until
// then tells the next server what it knows, too, if not all have heard it: ranks that had not
// connected yet would never learn that this one has closed. It does not wait again for one that has
// not answered: the loss of that one may be why this rank leaves, and must be told soon.
func (b *Sockets) pump() {
	defer close(b.done)
	tried := 0 // servers, since Release
	for b.life.Err() == nil && tried < len(b.members) {
		term := b.later() - 1
		server := b.server(term)
		if b.released.Load() && b.misses(server) {
			tried++
			b.follow(term + 1)
			continue
		}
		conn, err := b.dial(server, b.silence)
		b.hears(server, err == nil)
		if b.released.Load() {
			tried++
		}
		if err != nil {
			b.follow(term + 1)
			select {
			case <-b.life.Done():
			case <-time.After(time.Millisecond):
			}
			continue
		}
		p := newPump(b, conn, term)
		if p.run() {
			if server != b.rank || !b.hub.misses(b.rank) {
				return
			}
			b.follow(term + 1)
		}
	}
}

// pump tells the server what this rank knows.
type pump struct {
	*Sockets
	conn    net.Conn
	term    uint64
	lost    chan struct{} // closed when the server says no more
	sent    uint64        // the last call that the server was told
	askedAt time.Time
	active  time.Time // when there was something to do
	buf     []byte
}

func newPump(b *Sockets, conn net.Conn, term uint64) *pump {
	p := &pump{Sockets: b, conn: conn, term: term, lost: make(chan struct{}), sent: b.agreed.Load(),
		active: time.Now()}
	go func() {
		defer close(p.lost)
		for r := bufio.NewReader(conn); ; {
			f, err := readFact(r, len(b.members))
			if err != nil {
				return
			}
			b.hear(f)
		}
	}()
	return p
}

// run returns when the rank has to go to another server, or true when it leaves the board.
func (p *pump) run() (leaves bool) {
	defer func() {
		p.conn.Close()
		<-p.lost
	}()
	p.greet()
	timer := time.NewTimer(pace)
	defer timer.Stop()
	for {
		if p.flush() != nil {
			p.hears(p.server(p.term), false)
			p.follow(p.term + 1)
			return false
		}
		if p.later()-1 != p.term {
			p.say(fact{kind: factBye, number: p.later() - 1})
			return false
		}
		if p.rests() {
			timer.Stop()
		} else {
			timer.Reset(pace)
		}
		select {
		case <-p.lost:
			p.follow(p.term + 1)
			return false
		case <-p.life.Done():
			return true
		case <-p.stop:
			return p.sayGoodbye()
		case <-p.nudged:
		case <-timer.C:
			p.waits.Store(false)
		}
		p.asleep.Store(false)
	}
}

// greet queues what a new server has to know.
func (p *pump) greet() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out = append([]fact{{kind: factHello, number: p.term}}, p.facts()...)
	p.answered = p.asked
}

// flush tells what is new. What the rank has begun comes after the queue was taken, and
// goes before it: see [Health.Begun].
func (p *pump) flush() error {
	now := time.Now()
	p.mu.Lock()
	out := p.out
	p.out = nil
	busy := p.posted.Load() > p.agreed.Load() || p.waits.Load()
	switch {
	case p.asked > p.answered:
		if now.Sub(p.askedAt) > p.silence {
			p.mu.Unlock()
			return errFact
		}
	case len(out) > 0 || busy && now.Sub(p.news) > askTime:
		p.asked++
		p.askedAt = now
		out = append(out, fact{kind: factAsk, number: p.asked})
	}
	if busy || p.asked > p.answered {
		p.active = now
	}
	p.mu.Unlock()
	return p.write(out)
}

// write sends facts, after the calls that the server does not know. The hello stays first.
func (p *pump) write(out []fact) error {
	b := p.buf[:0]
	if len(out) > 0 && out[0].kind == factHello {
		b, out = out[0].append(b), out[1:]
	}
	digests, posted := p.calls.since(p.sent)
	if len(digests.body) > 0 {
		digests.rank = p.rank
		b = digests.append(b)
		p.active = time.Now()
	}
	for _, f := range out {
		b = f.append(b)
	}
	p.sent, p.buf = posted, b
	return p.send(b)
}

func (p *pump) send(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	p.conn.SetWriteDeadline(time.Now().Add(p.silence))
	_, err := p.conn.Write(b)
	return err
}

func (p *pump) say(f fact) error { return p.send(f.append(nil)) }

// rests reports whether nothing is to be done until a nudge.
func (p *pump) rests() bool {
	if time.Since(p.active) < lull {
		return false
	}
	p.asleep.Store(true)
	// A call may have been posted before it could see that.
	if p.posted.Load() > p.sent && p.asleep.CompareAndSwap(true, false) {
		return false
	}
	return p.asleep.Load()
}

// sayGoodbye tells the server what is left, and goodbye. It returns false if the server is gone
// before it has heard that: the next one is to hear it. At the end of the life of the board it does
// not wait.
func (p *pump) sayGoodbye() bool {
	p.mu.Lock()
	p.asked++
	p.askedAt = time.Now()
	question := p.asked
	p.out = append(p.out, fact{kind: factAsk, number: question})
	p.mu.Unlock()
	if p.flush() != nil {
		p.follow(p.term + 1)
		return false
	}
	for wait := spinwait.Patient(partTime); !wait.Over(); time.Sleep(50 * time.Microsecond) {
		p.mu.Lock()
		answered := p.answered >= question
		p.mu.Unlock()
		if answered || p.down(p.server(p.term)) {
			break
		}
		select {
		case <-p.lost:
			p.follow(p.term + 1)
			return false
		case <-p.life.Done():
			return true
		default:
		}
	}
	p.say(fact{kind: factBye})
	return true
}

// hear takes what the server tells.
func (b *Sockets) hear(f fact) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch f.kind {
	case factBye:
		raise(&b.term, f.number)
		b.nudge()
	case factAnswer:
		raise(&b.answered, min(f.number, b.asked))
		b.news = time.Now()
	case factSettled:
		b.settled = true
	case factReport:
		if b.seen.addFact(f) {
			b.reported = time.Now()
		}
		b.out = append(b.out, fact{kind: factHeard, rank: b.rank})
		b.nudge()
	case factDiffers:
		if b.seen.addFact(f) {
			b.differ(f.number)
		}
	default:
		if b.seen.addFact(f) && f.kind == factLeft {
			close(b.left)
		}
	}
	if b.seen.agreed > b.agreed.Load() {
		b.agreed.Store(b.seen.agreed)
		b.news = time.Now()
	}
}

// differ shows the header of the call that differs.
func (b *Sockets) differ(seq uint64) {
	b.differs.Store(true)
	f, ok := b.calls.header(seq)
	if !ok {
		return
	}
	f.rank = b.rank
	b.seen.addFact(f)
	b.out = append(b.out, f)
	b.nudge()
}
