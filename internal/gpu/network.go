package gpu

import (
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/euryale-ml/euryale/rendezvous"
)

// interfaceNames is the variable by which NCCL is told which network interfaces to use. Without it
// NCCL takes the first that is not loopback, which may lead nowhere: a container's bridge, say.
const interfaceNames = "NCCL_SOCKET_IFNAME"

// chooseNetwork has NCCL use the interface by which the other machines reach this one, unless the
// user has named one, and encrypt what it sends if this job does. NCCL reads the variable once in a
// process, when it makes its first id or communicator, and so this comes before.
func (b *Backend) chooseNetwork(lib library, w *rendezvous.World) error {
	how, err := encrypt(lib, w)
	if err != nil {
		return err
	}
	names, source := asked()
	if source == "" {
		i, err := w.Interface()
		if err != nil {
			return fmt.Errorf("%w: name the interface for NCCL in %s", err, interfaceNames)
		}
		if i.Flags&net.FlagLoopback != 0 { // machines that are simulated on one: NCCL knows better
			return nil
		}
		names, source = "="+i.Name, "its route to rank 0; "+interfaceNames+" names another"
		if err := os.Setenv(interfaceNames, names); err != nil {
			return err
		}
	}
	if w.LocalRank == 0 && b.Notice != nil {
		b.network.Do(func() {
			b.Notice(
				fmt.Sprintf("rank %d: between machines NCCL uses network interface %s (%s), %s",
					w.Rank, strings.TrimPrefix(names, "="), source, how))
		})
	}
	return nil
}

// encrypt has NCCL encrypt what it sends between machines, by a key that only the ranks have, if
// the job's connections are encrypted, and says how that went. An NCCL that cannot is used all the
// same.
func encrypt(lib library, w *rendezvous.World) (how string, err error) {
	if !w.TLS {
		return "unencrypted", nil
	}
	if err := lib.encrypts(); err != nil {
		return fmt.Sprintf("unencrypted in spite of EURYALE_TLS: %v", err), nil
	}
	key, err := w.Secret("nccl")
	if err != nil {
		return "", err
	}
	return "encrypted as EURYALE_TLS asks", lib.encrypt(hex.EncodeToString([]byte(key)))
}

// asked returns what the user asks NCCL for, and where, "" for nowhere. NCCL also reads files, in
// which the administrator may have named the interface, and prefers the environment to them.
func asked() (names, source string) {
	if names := os.Getenv(interfaceNames); names != "" {
		return names, interfaceNames
	}
	user := os.Getenv("NCCL_CONF_FILE")
	if home, err := os.UserHomeDir(); user == "" && err == nil {
		user = filepath.Join(home, ".nccl.conf")
	}
	for _, file := range []string{user, "/etc/nccl.conf"} {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // NCCL reads those that it can
		}
		for line := range strings.Lines(string(text)) {
			if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok &&
				name == interfaceNames {
				return value, file
			}
		}
	}
	return "", ""
}
