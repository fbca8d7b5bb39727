package session

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Elastic is a process of a job whose ranks may be lost and replaced: vm.WithElastic trains with
// it. It has a communicator for each generation.
type Elastic struct {
	job      *elastic.Job
	reach    *reach // nil where all processes are on one machine
	register rendezvous.Log
	env      rendezvous.Env
	host     string
	id       elastic.ID
	backends []backend.Backend // and so devices, for the life of the process

	view elastic.View
	comm *Session // of the generation; nil before
	stop func() bool
	only string // the backend of all generations, "" before the first one
	seat int    // of this process, from 1; 0 if it is not known yet
	over bool
}

// ElasticConfig says which process of which job this one is.
type ElasticConfig struct {
	ID       elastic.ID
	Limits   elastic.Limits
	First    elastic.View
	Register rendezvous.Log
	Env      rendezvous.Env // of the job: a generation has its own ranks and size
	Host     string         // where other machines reach this one; "" if there are none
	Seat     int            // see seatOf; 0 if it is not known
	Backends func() []backend.Backend
}

// NewElastic makes this process take part in an elastic job, which owns the register then.
func NewElastic(c ElasticConfig) *Elastic {
	e := &Elastic{register: c.Register, env: c.Env, host: c.Host, id: c.ID, seat: c.Seat,
		backends: c.Backends()}
	var unreached elastic.Unreached
	if c.Host != "" {
		e.reach = &reach{register: c.Register}
		unreached = e.reach.unreached
	}
	e.job = elastic.Start(c.Register, c.ID, c.Limits, c.First, c.Env.Timeout, unreached)
	return e
}

// Next waits until this process is a member of a generation, has it leave the generation before,
// connects it, and returns its communicator. A generation that cannot connect has ended, and the
// next one follows: leave is called again then.
func (e *Elastic) Next(ctx context.Context, leave func(elastic.View) error) (backend.Communicator,
	elastic.View, error) {
	e.unwatch()
	if e.comm == nil {
		e.prepare()
	}
	if e.reach != nil && e.reach.ln == nil {
		if err := e.reach.open(ctx, e.host, e.id); err != nil {
			return nil, elastic.View{}, err
		}
	}
	for {
		view, during, err := e.job.Next(ctx)
		if err == nil {
			e.comm.dissolve()
			err = leave(view)
		}
		if err != nil {
			return nil, view, err
		}
		s, err := e.connect(during, view)
		if err != nil {
			if errors.As(err, new(verdict)) && e.fails() {
				err = verdict{err, view.Rank(e.id)}
			}
			e.job.Broken(view, err)
			continue
		}
		e.view, e.comm = view, s
		e.stop = context.AfterFunc(during, func() { s.Abort(context.Cause(during)) })
		e.job.Connected(view.Generation)
		return s, view, nil
	}
}

// prepare starts drivers and opens the device of this process's seat: now, and not while the others
// wait for a replacement. A GPU takes 0.6 s. What is wrong connect says.
func (e *Elastic) prepare() {
	_, _ = note(e.backends, "", 0, false)
	only := env.Backend.Read(os.Getenv)
	i := slices.IndexFunc(e.backends, func(b backend.Backend) bool {
		return (only == "" || only == b.Name()) && b.Available() == nil
	})
	if i < 0 || e.seat == 0 {
		return
	}
	if b, opens := e.backends[i].(interface{ OpenDevice(local int) error }); opens {
		_ = b.OpenDevice(e.seat - 1)
	}
}

// fails reports whether the backend of all generations is not available here any more.
func (e *Elastic) fails() bool {
	return slices.ContainsFunc(availabilities(e.backends, e.only), func(a availability) bool {
		return a.Name == e.only && a.Problem != ""
	})
}

// connect connects this process to the members of a generation, which ends with a context.
func (e *Elastic) connect(during context.Context, v elastic.View) (s *Session, err error) {
	m := newMeeting(e.id, v, e.env, e.host != "")
	ctx, cancel := context.WithTimeout(during, m.env.Timeout)
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	if e.reach != nil {
		go func() {
			if why := m.probed(e.reach.unreached(ctx, v.Members)); why != nil {
				end(why)
			}
		}()
	}
	for m.next != over {
		switch m.next {
		case opens:
			m.opened(freeAt(e.host))
		case tells:
			m.told(m.at, e.register.Set(ctx, m.key, []byte(m.at)))
		case asks:
			at, err := e.register.Get(ctx, m.key)
			m.told(string(at), err)
		case joins:
			s, err = e.join(ctx, m.env, v.Generation)
			m.joined(err)
		}
	}
	return s, m.err
}

// join joins the ranks of a generation.
func (e *Elastic) join(ctx context.Context, env rendezvous.Env, generation int) (s *Session,
	err error) {
	before := e.comm.Watch()
	// Connect says what is wrong, and starts the watches of all ranks if one was watched.
	env.Note, _ = note(e.backends, e.only, e.seat, before.Started())
	w, err := rendezvous.Join(ctx, env)
	if err != nil {
		return nil, err
	}
	w.Timeout = e.env.Timeout
	seat, err := seatOf(ctx, w, e.backends)
	if err == nil {
		w.LocalRank = seat - 1
		s, err = Connect(ctx, w, e.backends, nil, generation)
	}
	if err != nil {
		Leave(w, err)
		return nil, err
	}
	if before.Served() {
		s.watch.Serve()
	}
	e.seat, e.only = seat, s.Capabilities().Backend
	return s, nil
}

// seatOf returns the number from 1 that this process has on its machine, in all generations: it
// says which GPU.
func seatOf(ctx context.Context, w *rendezvous.World, backends []backend.Backend) (int, error) {
	infos, err := exchangeInfos(ctx, w, backends)
	if err != nil {
		return 0, err
	}
	nodes, err := w.Nodes(ctx)
	if err != nil {
		return 0, err
	}
	return seats(infos, nodes)[w.Rank], nil
}

// seats gives ranks that have no number, or one that a rank before them has, those that are free on
// their machines, in order.
func seats(infos []rankInfo, nodes []int) []int {
	type place struct{ node, seat int }
	taken, all := map[place]bool{}, make([]int, len(infos))
	for r, info := range infos {
		if at := (place{nodes[r], info.Seat}); !taken[at] {
			all[r], taken[at] = info.Seat, true
		}
	}
	for r, seat := range all {
		for seat == 0 || all[r] == 0 && taken[place{nodes[r], seat}] {
			seat++
		}
		all[r], taken[place{nodes[r], seat}] = seat, true
	}
	return all
}

// Job returns what tells the job where this process is.
func (e *Elastic) Job() *elastic.Job { return e.job }

// Release closes a communicator of Next, nil for none, and after Close the devices. The errors of a
// communicator say nothing that is not known.
func (e *Elastic) Release(comm backend.Communicator) error {
	if comm != nil {
		comm.Close()
	}
	if e.over {
		return CloseBackends(e.backends)
	}
	return nil
}

// Close ends the part of this process: after its last step, done says, or before. Release follows.
func (e *Elastic) Close(done bool) error {
	e.unwatch()
	e.over = true
	switch {
	case e.comm == nil:
	case done:
		e.job.Finish(e.view.Generation)
	default: // the others need not wait
		e.comm.Abort(&elastic.StoppedError{ID: e.id})
	}
	e.job.Close()
	if e.reach != nil {
		e.reach.close()
	}
	return e.register.Close()
}

// unwatch leaves the communicator as it is when its generation ends: no call is under way.
func (e *Elastic) unwatch() {
	if e.stop != nil {
		e.stop()
	}
}
