#!/bin/sh
# Make what opens the cluster of compose.yaml, each in the folder of who may have it. What is there
# stays, certificates aside, which are over after ninety days: they are renewed after thirty.
#
#   authority/  the two authorities, elastic and etcd: mounted nowhere else
#   coord/      the coordinators' certificate, the file of tokens, and what etcd asks them for
#   store/      the certificate of etcd's members
#   node/       ca.crt and a token of role node
#   user/       ca.crt and a token of role submit
set -eu
umask 077
root=${1:-/secrets}
cd "$root"

authority() {  # FOLDER --host HOST...: make an authority, or renew its servers' certificate
    folder=$1
    shift
    set -- --host localhost --host 127.0.0.1 "$@"
    if [ -e "$folder/ca.crt" ]; then
        is_new "$folder/coordinator" ||
            elastic-coord certs issue "$folder" --name coordinator --role admin "$@" >/dev/null
    else  # Whole, or not at all.
        rm -rf "$folder.new"
        # What it prints names the folder as it is until the next line.
        elastic-coord certs init "$folder.new" "$@" >/dev/null
        mv "$folder.new" "$folder"
    fi
}

is_new() {  # FOLDER: whether its certificate is one of the last thirty days
    [ -n "$(find "$1/tls.crt" -mtime -30 2>/dev/null)" ]
}

give() {  # FILE TARGET: replace TARGET, whole
    cmp -s "$1" "$2" && return
    cp "$1" "$2.new"
    mv "$2.new" "$2"
}

token() {  # ROLE FILE: make a token, unless there is one
    if [ ! -s "$2" ]; then
        elastic-coord tokens create --tokens coord/tokens.json --role "$1" >"$2.new"
        mv "$2.new" "$2"
    fi
}

authority authority/elastic --host coord-1 --host coord-2
authority authority/etcd --host etcd-1 --host etcd-2 --host etcd-3
is_new authority/etcd/coordinators ||
    elastic-coord certs issue authority/etcd --name coordinators --role read >/dev/null

for name in ca.crt tls.crt tls.key; do
    give "authority/etcd/coordinator/$name" "store/$name"
    give "authority/etcd/coordinators/$name" "coord/store-$name"
    give "authority/elastic/coordinator/$name" "coord/$name"
done
give authority/elastic/ca.crt node/ca.crt
give authority/elastic/ca.crt user/ca.crt
token node node/token
token submit user/token
echo "all is there: authority/ coord/ store/ node/ user/ below $root"
