package launch

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Host is a machine that ssh reaches.
type Host struct {
	// Name is passed to ssh: a name, an address or an alias of ssh's configuration, optionally with
	// USER@ before it.
	Name string
	// Slots is the maximum number of ranks on the host.
	Slots int
}

// ParseHosts reads a list of hosts such as a:4,b:4,user@c,[fd00::7]:2, in the form of Open MPI's
// option -H. A host without a slot count runs one rank. Listing a host again adds ranks.
func ParseHosts(list string) (hosts []Host, err error) {
	for entry := range strings.SplitSeq(list, ",") {
		name, slots := entry, "1"
		if colon := strings.LastIndexByte(entry, ':'); colon > strings.LastIndexByte(entry, ']') {
			name, slots = entry[:colon], entry[colon+1:]
		}
		n, err := strconv.Atoi(slots)
		if err != nil {
			return nil, fmt.Errorf("host %q: write HOST:N, with the number of ranks that it takes",
				entry)
		}
		if hosts, err = addHost(hosts, name, n); err != nil {
			return nil, err
		}
	}
	return hosts, nil
}

// ReadHostfile reads a hostfile in Open MPI's form. Each line has a host, with slots=N for the
// number of ranks that it takes, or 1. A user may be given as USER@HOST or by user=USER. max_slots
// has no effect. Text after # is a comment.
func ReadHostfile(r io.Reader) (hosts []Host, err error) {
	lines := bufio.NewScanner(r)
	for number := 1; lines.Scan(); number++ {
		text, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(text)
		if len(words) == 0 {
			continue
		}
		h, err := readHost(words[0], strings.Join(words[1:], " "))
		if err == nil {
			hosts, err = addHost(hosts, h.Name, h.Slots)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(hosts) == 0 {
		return nil, errors.New("it names no host: write a line for each, such as node1 slots=4")
	}
	return hosts, nil
}

// readHost reads the settings that follow a host in a hostfile.
func readHost(name, settings string) (Host, error) {
	h := Host{name, 1}
	colon := strings.LastIndexByte(name, ':')
	if host, n := name[:max(colon, 0)], name[colon+1:]; strings.IndexByte(host, ':') < 0 ||
		strings.HasSuffix(host, "]") {
		if _, err := strconv.Atoi(n); err == nil && colon > 0 {
			return h, fmt.Errorf("%q: a hostfile has the number of ranks after the host: write "+
				"%s slots=%s", name, host, n)
		}
	}
	settings = strings.NewReplacer(" = ", "=", " =", "=", "= ", "=").Replace(settings)
	for setting := range strings.FieldsSeq(settings) {
		key, value, _ := strings.Cut(setting, "=")
		n, err := strconv.Atoi(value)
		switch key {
		case "slots":
			h.Slots = n
		case "max_slots", "max-slots", "slots_max":
		case "user", "username":
			h.Name, err = value+"@"+name, nil
		default:
			err = errors.ErrUnsupported
		}
		if err != nil {
			return h, fmt.Errorf("%q after host %s: write slots=N, max_slots=N or user=NAME",
				setting, name)
		}
	}
	return h, nil
}

// addHost adds slots to a host.
func addHost(hosts []Host, name string, slots int) ([]Host, error) {
	user, address, found := strings.Cut(name, "@")
	if !found {
		user, address = "", name
	}
	bare := strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
	switch {
	case bare == "" || found && user == "" || strings.HasPrefix(name, "-") ||
		strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c == 0x7f }):
		return nil, fmt.Errorf("host %q: write what ssh takes, HOST or USER@HOST", name)
	case bare == address && strings.Contains(address, ":"):
		return nil, fmt.Errorf("host %q: put an IPv6 address in brackets, as in [fd00::7]:4", name)
	}
	h := Host{strings.TrimSuffix(name, address) + bare, slots}
	if err := h.check(); err != nil {
		return nil, err
	}
	for i := range hosts {
		if hosts[i].Name == h.Name {
			hosts[i].Slots += slots
			return hosts, hosts[i].check()
		}
	}
	return append(hosts, h), nil
}

// check reports values that no host can have.
func (h Host) check() error {
	if h.Slots < 1 || h.Slots > MaxRanks {
		return fmt.Errorf("host %s with %d ranks: a host takes 1 to %d", h.Name, h.Slots, MaxRanks)
	}
	return nil
}

// Slots is the total number of ranks that hosts take.
func Slots(hosts []Host) (n int) {
	for _, h := range hosts {
		n += h.Slots
	}
	return n
}
