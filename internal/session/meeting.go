package session

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/rendezvous"
)

// joinTime bounds how long the ranks of a generation take to connect: all are ready. Each of many
// takes joinRankTime more: rank 0 sends it what all tell. Those of the first generation start, and
// have the time of any job.
const (
	joinTime     = 20 * time.Second
	joinRankTime = 10 * time.Millisecond
)

// meeting decides how a process meets the other members of a generation: those on several machines
// meet at a port that is free on the machine of rank 0, which tells them by the register. It is
// pure, so that the simulation of sim_test.go can move it; [Elastic.connect] drives it.
//
//	rank 0:  opens -> tells ---+
//	                           v
//	others:  asks ----------> joins -> over
type meeting struct {
	env  rendezvous.Env // of the generation; its Timeout bounds the meeting
	key  string         // of the register: where they meet
	at   string         // there
	next stage
	err  error // why it has ended without all
}

// stage is what the driver of a meeting does next. What follows says how that ended.
type stage int

const (
	opens stage = iota // a port: opened follows
	tells              // the register meeting.at: told follows
	asks               // the register where: told follows
	joins              // the ranks of meeting.env: joined follows
	over
)

// newMeeting is of a generation of a job. apart says that its processes are on several machines.
func newMeeting(id elastic.ID, v elastic.View, job rendezvous.Env, apart bool) *meeting {
	m := &meeting{env: job, key: fmt.Sprintf("elastic/meeting/%d", v.Generation), next: joins}
	env := &m.env
	if v.Generation > 0 {
		env.Timeout = min(env.Timeout, joinTime+time.Duration(len(v.Members))*joinRankTime)
	}
	env.Job = fmt.Sprintf("%s.%d", strings.TrimSpace(job.Job), v.Generation)
	env.Rank, env.Size = v.Rank(id), len(v.Members)
	env.LocalRank, env.LocalSize, env.Node = env.Rank, env.Size, 0
	switch {
	case !apart || env.Size == 1:
	case env.Rank == 0:
		m.next = opens
	default:
		m.next = asks
	}
	return m
}

// opened hears of a port, and its address on this machine.
func (m *meeting) opened(at string, err error) {
	if m.at, m.next = at, tells; err != nil {
		m.ends(fmt.Errorf("find a port to meet at: %w", err))
	}
}

// told hears what the register has.
func (m *meeting) told(at string, err error) {
	if err != nil {
		m.ends(fmt.Errorf("ask where the ranks meet: %w", err))
		return
	}
	host, port, err := net.SplitHostPort(at)
	m.at, m.next = at, joins
	m.env.Addr, m.env.LocalRank, m.env.LocalSize = host, 0, 1 // Join asks who is on which machine
	if err == nil {
		m.env.Port, err = strconv.Atoi(port)
	}
	if err != nil {
		m.ends(fmt.Errorf("the ranks meet at %q: %w", at, err))
	}
}

// joined hears that all are connected, or why not.
func (m *meeting) joined(err error) { m.ends(err) }

func (m *meeting) ends(err error) { m.next, m.err = over, err }

// probed hears which members this process does not reach. It returns why the meeting ends: nobody
// can join all of them.
func (m *meeting) probed(unreached []elastic.ID) error {
	if len(unreached) == 0 {
		return nil
	}
	return &elastic.UnreachedError{IDs: unreached}
}

// signs are what a process has seen of another one that it tries to reach.
type signs struct {
	answers bool // it sends data back, has ended, or has not begun
	took    bool // its machine takes data
	lives   bool // it does what it is asked to, without data
}

// reached reports whether data get through to the other process and back. A machine that takes data
// is enough if its process says nothing, since that may be stopped.
func (s signs) reached() bool { return s.answers || s.took && !s.lives }

// judge says which processes are not reached, given what was seen of each in a time. It is not sure
// if that is longer than a try takes: this process was stopped meanwhile.
func judge(ids []elastic.ID, seen []signs, in time.Duration) (unreached []elastic.ID, sure bool) {
	for i, id := range ids {
		if !seen[i].reached() {
			unreached = append(unreached, id)
		}
	}
	return unreached, len(unreached) == 0 || in < 2*reachTime
}
