# What ssh runs on a host (remote.go). It says which system this is, takes files into the cache,
# and becomes the launcher. Each line of its input is a request: HASH SIZE NAME for a file, which
# follows once this has said "send", or HASH run NAME for the launcher.
umask 077
cache="${XDG_CACHE_HOME:-$HOME/.cache}/euryale/run"
refuse() {
	echo "$*" >&2
	exit 3
}
instead="or set XDG_CACHE_HOME on the host"
mkdir -p "$cache" && cd "$cache" ||
	refuse "the cache folder $cache cannot be used: remove it, $instead"
# From here on all paths are relative: whatever others make of the path, the folder is this one.
set -f
set -- $(ls -ldn .)
case "$1 $3" in
drwx------*" $(id -u)") ;;
*) refuse "the cache folder $cache must be a directory of this user alone, and is $1 of user $3:" \
	"remove it, $instead" ;;
esac
# Who may write a folder above can put another folder in the place of this one, except in a folder
# with the sticky bit, such as /tmp: there only the owner of an entry can rename it.
dir=$(pwd -P)
while [ "$dir" != / ]; do
	dir=${dir%/*}
	dir=${dir:-/}
	set -- $(ls -ldn "$dir")
	case "$1" in
	d????????[tT]*) writes= ;;
	d???????w*) writes=all ;;
	d????w*+) writes=all ;; # or a user whom an access list names
	d????w*) # the group of a user's own is that user
		writes=all
		[ "$4" = "$(id -g)" ] && [ "$(id -gn)" = "$(id -un)" ] && writes= ;;
	*) writes= ;;
	esac
	[ -z "$writes" ] || refuse "the cache folder $cache is in $dir, which others may write ($1):" \
		"they could have another program started: run chmod go-w $dir, $instead"
	[ "$3" = 0 ] || [ "$3" = "$(id -u)" ] || refuse "the cache folder $cache is in $dir of user" \
		"$3, who could have another program started: set XDG_CACHE_HOME on the host to a folder" \
		"elsewhere"
done
set +f
new=".new.$(uname -n).$$"
trap 'rm -f "$new"' EXIT
# The first line ends what login scripts have left unfinished.
echo
echo "euryale-host $(uname -s) $(uname -m) $SSH_CONNECTION"
while read -r hash size name; do
	file="./$hash/$name"
	if [ "$size" = run ]; then # without the files that a crash has left
		find . -name ".new.*" -mtime +0 -exec rm -f {} +
		exec "$file" host
	fi
	if [ -x "$file" ] && [ "$(wc -c <"$file")" -eq "$size" ]; then
		touch "$hash"
	else
		echo send
		if ! { mkdir -p "$hash" && head -c "$size" >"$new" &&
			[ "$(wc -c <"$new")" -eq "$size" ] && chmod 700 "$new" && mv -f "$new" "$file"; }; then
			rmdir "$hash"
			exit 4
		fi
	fi
	echo have
done
